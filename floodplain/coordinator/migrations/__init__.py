"""How the tables of a store became what they are: one script a version, run by alembic from inside the package."""
