"""Everything that touches torch. Decisions are made elsewhere and carried out here."""
