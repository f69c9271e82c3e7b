"""Records of a run: a folder of text and pictures, and pages made from it. Start with ``run_dir.py``."""
