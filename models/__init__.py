"""Reference applications of stacked_remat; they run from a checkout and are not part of the wheel."""

from models import starting as starting  # first, for signals that come during other imports
