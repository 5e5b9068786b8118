// Package deploy contains what users install: the Helm chart, the kustomizations that are rendered
// from it, examples, and the jobs for Nomad.
package deploy

import "embed"

// Files are all forms, with their paths below this directory: chart, kustomize, examples.
//
//go:embed all:chart examples kustomize
var Files embed.FS
