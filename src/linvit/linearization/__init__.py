"""Turns trained softmax transformers into linear ones: the student, and the loss that keeps it near its teacher."""
