"""What every report is made of: charts, their drawing, a page's look, the machine. It knows no subject."""
