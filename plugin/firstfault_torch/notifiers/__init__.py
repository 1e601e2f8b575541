"""Notifiers of firstfault's own: a webhook and OpenTelemetry. Nothing imports them: `verdict` finds them."""
