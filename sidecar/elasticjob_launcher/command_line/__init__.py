"""Reading of commands: launchers, wrappers, interpreters and shell lines. No I/O.

The launcher, the operator and the CLI judge a command by these tables and by this grammar.
"""
