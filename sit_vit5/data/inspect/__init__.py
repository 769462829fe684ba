"""The command `python -m sit_vit5.data.inspect`."""
