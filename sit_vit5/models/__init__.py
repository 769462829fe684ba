"""The networks: one block that reads a recipe, and the denoiser built of it."""
