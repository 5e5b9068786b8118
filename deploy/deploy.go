// Package deploy embeds the Helm chart, the kustomizations that are rendered from it, and examples.
// Its directory also contains jobs for Nomad.
package deploy

import "embed"

// Files contains the directories chart, kustomize and examples.
//
//go:embed all:chart examples kustomize
var Files embed.FS
