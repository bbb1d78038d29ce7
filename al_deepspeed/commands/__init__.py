"""One module a subcommand of `al-deepspeed`; cli.py lists them. Each imports its heavy parts when it runs."""
