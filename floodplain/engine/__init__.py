"""A real model behind the step loop. torch and numpy only at import."""
