"""The program inside every persistent sandbox: its protocol, its client, its source in C."""
