"""What is asked over HTTP: the site (live and plan), its figures, and the server of prompts."""
