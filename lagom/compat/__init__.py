"""Other people's APIs, served by lagom or made to work beside it; nothing else in lagom imports this."""
