"""What a video DiT's trainer needs besides the engine: objective, validation, model and export."""
