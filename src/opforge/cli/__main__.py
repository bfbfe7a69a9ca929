"""``python -m opforge.cli`` is `opforge`."""

from opforge.cli.main import main

if __name__ == "__main__":
    main()
