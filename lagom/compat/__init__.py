"""APIs of Horovod, Maggy and petastorm, served by lagom or made to work beside it; no other room imports this."""
