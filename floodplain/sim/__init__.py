"""Floor 5: the loop and the policies in virtual time. Nothing here decides; the policies do."""
