"""Models shipped as shapes: configs with their sources, a made tokenizer, seeded weights; nothing is downloaded."""
