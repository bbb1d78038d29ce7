"""What a trainer of a video diffusion transformer needs besides the engine: objective, validation, model, export."""
