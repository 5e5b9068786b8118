//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// The rack's names in deploy/kustomize/simulator.
const (
	rackAPIPort   = 12225
	rackAdminPort = 12226
	rackProject   = "default"
	rackToken     = "oxide-token-e2e"
)

// rackClients accesses the simulated rack from outside, with Oxide's own client and the admin
// listener.
type rackClients struct {
	*oxide.Client
	Admin adminapi.Client
}

// newRackClients connects to the rack at the address of the control plane, whose network its pod
// uses.
func newRackClients(n node) (*rackClients, error) {
	address, _, err := n.IP()
	if err != nil {
		return nil, fmt.Errorf("find the rack's address: %w", err)
	}
	client, err := oxide.NewClient(
		oxide.WithHost(fmt.Sprintf("http://%s:%d", address, rackAPIPort)),
		oxide.WithToken(rackToken),
		oxide.WithHTTPClient(&http.Client{
			Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute,
		}))
	if err != nil {
		return nil, fmt.Errorf("speak to the rack: %w", err)
	}
	admin := adminapi.Client{URL: fmt.Sprintf("http://%s:%d", address, rackAdminPort)}
	return &rackClients{Client: client, Admin: admin}, nil
}

// attachedTo returns the name of the node whose instance has the disk, or "".
func (r *rackClients) attachedTo(ctx context.Context, diskID string) (string, error) {
	state, err := r.Admin.State(ctx)
	if err != nil {
		return "", err
	}
	for _, a := range state.Attachments {
		if a.DiskID != diskID {
			continue
		}
		for worker, id := range instanceIDs {
			if id == a.InstanceID {
				return worker, nil
			}
		}
		return a.InstanceID, nil
	}
	return "", nil
}
