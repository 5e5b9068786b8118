package conformance

import "context"

func (w *session) runData(context.Context) error { return nil }
