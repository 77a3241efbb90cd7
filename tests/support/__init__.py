"""Shared fakes and generators of the tests, never a copy of the code under test."""
