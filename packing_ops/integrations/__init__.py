"""Seams to host libraries, one module per host. Nothing is imported here, and nothing else imports these."""
