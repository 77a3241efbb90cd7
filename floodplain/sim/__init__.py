"""Floor 5: the loop and the policies in virtual time. All decisions are the policies'."""
