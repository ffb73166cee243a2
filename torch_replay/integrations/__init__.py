"""Other people's models on this library's memory; each needs a package of its own, which nothing else imports."""
