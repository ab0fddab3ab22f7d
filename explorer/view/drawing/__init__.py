"""What every picture is made with: colours, units, axes, rows."""
