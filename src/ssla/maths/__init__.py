"""Small dense mathematics for thousands of tasks at once. It imports nothing from ssla."""
