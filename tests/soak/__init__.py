"""The mixed soak, a program: ``python -m soak`` with ``tests`` on the path. Nothing here is collected by pytest."""
