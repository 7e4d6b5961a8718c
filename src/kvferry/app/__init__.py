"""The application: configuration, runs, loggers, command line. Nothing below imports it."""
