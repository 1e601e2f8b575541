"""Tools independent of jobs and failures: text, loggers, async calls, TOML, lazy imports."""
