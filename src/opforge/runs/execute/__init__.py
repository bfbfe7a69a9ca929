"""Where the jobs of a run are judged."""
