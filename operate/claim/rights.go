package claim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// right is a verb on a resource.
type right struct{ verb, resource string }

// rights returns what the change and its undoing do that the other checks have neither done nor
// rehearsed.
func (p plan) rights() []right {
	all := []right{{"patch", persistentVolumes}, {"patch", claims}, {"delete", claims},
		{"get", "nodes"}, {"list", volumeAttachments}, {"list", "events"}}
	if p.SnapshotClass != "" {
		all = append(all, right{"create", snapshots}, right{"delete", snapshots})
	}
	if resource := p.Owner.resource(); resource != "" {
		all = append(all, right{"patch", resource})
	}
	return all
}

// checkRights asks the API server whether the user has the rights to the whole change. Otherwise it
// would end halfway, with the workload stopped.
func (r *run) checkRights(ctx context.Context, _, _ object, p *plan) error {
	var reviews []object
	for _, right := range p.rights() {
		resource, group, _ := strings.Cut(right.resource, ".")
		attributes := object{"verb": right.verb, "resource": resource, "group": group}
		if right.resource != persistentVolumes && resource != "nodes" &&
			right.resource != volumeAttachments {
			attributes["namespace"] = p.Namespace
		}
		reviews = append(reviews, object{"apiVersion": "authorization.k8s.io/v1",
			"kind": "SelfSubjectAccessReview", "spec": object{"resourceAttributes": attributes}})
	}
	answers, err := r.review(ctx, reviews)
	if err != nil {
		r.note("your rights are not checked: %v", err)
		return ctx.Err()
	}
	var lacking []string
	for _, answer := range answers {
		if answer.at("status", "allowed") != true {
			of := func(key string) string { return answer.str("spec", "resourceAttributes", key) }
			lacking = append(lacking, of("verb")+" "+of("resource"))
		}
	}
	if len(lacking) > 0 {
		return fmt.Errorf("you lack rights that the change needs: %s. Ask for those in "+
			"docs/howto/grow-a-volume.md. Nothing has been changed", strings.Join(lacking, ", "))
	}
	return nil
}

// review creates reviews in one call of kubectl, and returns them with their answers.
func (r *run) review(ctx context.Context, reviews []object) ([]object, error) {
	text, err := json.Marshal(object{"apiVersion": "v1", "kind": "List", "items": reviews})
	if err != nil {
		return nil, err
	}
	out, err := r.Kubectl(ctx, text, "create", "--filename=-", "--output=json")
	if err != nil {
		return nil, err
	}
	var answers []object
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var answer object
		switch err := decoder.Decode(&answer); {
		case errors.Is(err, io.EOF) && len(answers) == len(reviews):
			return answers, nil
		case errors.Is(err, io.EOF):
			return nil, fmt.Errorf("expected %d answers of the API server, found %d", len(reviews),
				len(answers))
		case err != nil:
			return nil, fmt.Errorf("the output of kubectl create is not JSON: %w", err)
		}
		answers = append(answers, answer)
	}
}
