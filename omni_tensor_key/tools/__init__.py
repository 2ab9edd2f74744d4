"""Tools for people: the command line and what it runs."""
