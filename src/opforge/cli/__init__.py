"""The command line: one small file per verb. Results go to stdout, progress and errors to stderr."""
