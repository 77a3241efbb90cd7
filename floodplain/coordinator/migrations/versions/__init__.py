"""Scripts of alembic, ``vN_...``, in the order of their ``down_revision``."""
