"""`linvit advise`: does another attention make a network faster, on this device, from which image size, and which?"""
