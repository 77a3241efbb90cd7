"""The loop and the policies in virtual time. All decisions are the policies'."""
