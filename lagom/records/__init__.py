"""Records of a run: a folder of text, and a page made from it."""
