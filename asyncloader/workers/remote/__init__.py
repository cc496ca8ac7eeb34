"""Workers on other machines: agents that run them there, and the trainer's side of it."""
