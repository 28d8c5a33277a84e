"""Small dense mathematics for thousands of tasks at once. Nothing here imports ssla."""
