"""The demo policy: a tiny Qwen3-architecture model and the script that pre-trains it from nothing."""
