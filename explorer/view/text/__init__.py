"""One sentence a student understands for every word that is not everyday English."""
