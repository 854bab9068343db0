"""The `pardraft` command: app, and one file per command."""
