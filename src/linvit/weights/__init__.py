"""Loading of official checkpoints: reads untrusted files, translates names, resizes tables."""
