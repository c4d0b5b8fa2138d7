"""llama.cpp's own routes, as far as editors use them."""
