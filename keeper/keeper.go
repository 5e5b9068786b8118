// Package keeper implements oxide-node-keeper. It does in a Kubernetes cluster what the driver must
// not do: it stops and starts the instances of nodes. It has three duties, and a switch for each.
//
// Cold attach: racks without hot-plug attach and detach a disk only while its instance is stopped.
// The keeper looks for VolumeAttachments that wait for a stop. If the node's owner allows it, the
// keeper stops the instance, wakes the attacher, and starts the instance again. See cold.go.
//
// Startup taint: a node joins with a taint, which the keeper removes when the driver is registered
// there. See leave.go.
//
// Leaving nodes: a node whose instance the rack reports as stopped or destroyed gets the
// out-of-service taint, so that Kubernetes moves its pods at once. A Leaver in the node's pod keeps
// the driver until the node's volumes are detached. See leave.go.
//
// A person can use a Mover to move a volume that stays with its node. See move.go.
//
// All that the keeper holds in memory is a list of the instances that it has stopped: it starts
// them again even if the API server is unreachable (rack.go). Each Round reads the cluster and the
// rack, decides, and does at most one thing for a node. The keeper records its next step in a
// ConfigMap (cluster.go), so that any replica can continue what another one began.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	policyv1 "k8s.io/client-go/kubernetes/typed/policy/v1"
	storagev1 "k8s.io/client-go/kubernetes/typed/storage/v1"
	"k8s.io/client-go/rest"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// Keeper looks after the nodes of one cluster.
type Keeper struct {
	Config     Config
	Kubernetes *Cluster
	Rack       *rack.Client
	// Namespace is the namespace of the keeper's records.
	Namespace string
	Log       *slog.Logger
	Metrics   *Metrics
	// Now is the clock; nil means time.Now.
	Now func() time.Time

	mu sync.Mutex
	// guarded by mu: stops contains the instances that this process has asked to stop and has to
	// start, with the times of the requests. silent is when the API server first failed to answer
	// StartStopped; it is zero if the server has answered since.
	stops  map[string]time.Time
	silent time.Time
}

// ErrStepAside reports that only the node on which this keeper runs is left to be stopped, so
// another replica has to lead.
var ErrStepAside = errors.New("the node to be stopped is the one this keeper runs on")

// Round reads the cluster and the rack once, and does the next thing. It returns the longest time
// to wait until the next round. After an error other than ErrStepAside, the next round tries again.
func (k *Keeper) Round(ctx context.Context) (time.Duration, error) {
	v, err := k.observe(ctx)
	if err != nil {
		return k.Config.Interval, err
	}
	// Cold attach comes first: an instance that is stopped for it must not wait for anything else.
	again, err := k.coldAttach(ctx, v)
	errs := []error{err}
	if k.Config.StartupTaint {
		errs = append(errs, k.removeStartupTaints(ctx, v))
	}
	errs = append(errs, k.fence(ctx, v))
	return min(again, k.Config.Interval), errors.Join(errs...)
}

func (k *Keeper) now() time.Time {
	if k.Now != nil {
		return k.Now()
	}
	return time.Now()
}

// Cluster contains the Kubernetes clients that this package uses, which share their connections.
// The clientset of client-go contains the clients of all API groups; the others would take a fifth
// of the keeper's memory.
type Cluster struct {
	Coordination *coordinationv1.CoordinationV1Client
	Core         *corev1.CoreV1Client
	Policy       *policyv1.PolicyV1Client
	Storage      *storagev1.StorageV1Client
}

// Connect returns the clients of a cluster. They send userAgent as their User-Agent.
func Connect(config *rest.Config, userAgent string) (*Cluster, error) {
	config = rest.CopyConfig(config)
	config.UserAgent = userAgent
	http, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes client: %w", err)
	}
	var c Cluster
	var errs [4]error
	c.Coordination, errs[0] = coordinationv1.NewForConfigAndClient(config, http)
	c.Core, errs[1] = corev1.NewForConfigAndClient(config, http)
	c.Policy, errs[2] = policyv1.NewForConfigAndClient(config, http)
	c.Storage, errs[3] = storagev1.NewForConfigAndClient(config, http)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("the Kubernetes client: %w", err)
	}
	return &c, nil
}
