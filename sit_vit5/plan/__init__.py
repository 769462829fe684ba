"""What a training run will need: memory, time and disk, estimated without training anything."""
