"""What setup.py and the tests share. Nothing here is installed."""
