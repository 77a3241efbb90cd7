"""What several tests share: fakes and generators, never a copy of the code under test."""
