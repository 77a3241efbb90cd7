"""Migrations of the store's tables: one script a version, run by alembic from inside the package."""
