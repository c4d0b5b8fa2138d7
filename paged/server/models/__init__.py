"""One server of many models: which are loaded, and how requests reach them."""
