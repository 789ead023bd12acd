"""Static analysis of a program: its imports, and its changes of the environment around them."""
