"""Images of prompts, on the host: read, resized, cut into patches. Needs numpy, and Pillow to read them."""
